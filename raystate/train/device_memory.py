"""When the devices have back what a process held that has ended.

XLA takes most of a device's memory at its start, and less of it without a word while a killed
trainer's memory is not back yet. The driver gives it back as the kernel ends the process: not before
its end, and perhaps a little later.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_uint, c_ulonglong, c_void_p

from raystate.arena.processes import is_gone, mark_process
from raystate.machine.own_time import own_time
from raystate.waits import DEVICE_FREE_S, MOMENT_S, SOON_S

_library = "libnvidia-ml.so.1"  # tests put a stand-in here
_LITTLE = 0.25  # of a device: XLA takes the rest


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


def wait_until_free(ended: Sequence[int], devices: Sequence[str]) -> None:
    """Wait until these processes are gone, and until their memory is back as far as that shows: seconds at most.

    Args:
        ended: pids on this node; none: nothing is waited for.
        devices: numbers or names, as in CUDA_VISIBLE_DEVICES. What others hold of them doesn't fall, and is soon waited for no more.
    """
    if not ended:
        return
    end_s = own_time() + DEVICE_FREE_S
    marks = [mark for mark in map(mark_process, ended) if mark.start_ticks]
    while not all(map(is_gone, marks)) and own_time() < end_s:
        time.sleep(SOON_S)
    least, fell_s = 1.0, own_time()
    while own_time() < min(end_s, fell_s + MOMENT_S):
        share = share_in_use(devices)
        if share <= _LITTLE:
            return
        if share < least:
            least, fell_s = share, own_time()
        time.sleep(SOON_S)


def share_in_use(devices: Sequence[str]) -> float:
    """How much of its memory the fullest of these devices has in use, 0.0 to 1.0. 0.0: NVIDIA's library can't tell, or isn't there."""
    try:
        nvml = ctypes.CDLL(_library)
        calls = nvml.nvmlInit_v2, nvml.nvmlDeviceGetHandleByIndex_v2, nvml.nvmlDeviceGetHandleByUUID, nvml.nvmlDeviceGetMemoryInfo
    except (OSError, AttributeError):
        return 0.0
    init, by_number, by_name, memory_of = calls
    by_number.argtypes, by_name.argtypes = (c_uint, POINTER(c_void_p)), (c_char_p, POINTER(c_void_p))
    memory_of.argtypes = (c_void_p, POINTER(_Memory))
    failed, most = init(), 0.0
    for name in devices:
        device, memory = c_void_p(), _Memory()
        failed = failed or (by_number(int(name), device) if name.isdigit() else by_name(name.encode(), device))
        failed = failed or memory_of(device, memory)
        most = max(most, memory.used / memory.total if memory.total else 0.0)
    return 0.0 if failed else most
