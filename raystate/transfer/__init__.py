"""Steps that leave a run and steps that come from elsewhere: safetensors and plain Orbax, at any place that fsspec reaches.

Everything is streamed: of a state only a few boxes of at most `boxes.BATCH_BYTES` together are in memory at a time.
"""

from raystate.transfer.exporting import ExportReport, export_step
from raystate.transfer.importing import ImportReport, import_steps
from raystate.transfer.incoming import IncomingStep
from raystate.transfer.sources import open_source

__all__ = ["ExportReport", "ImportReport", "IncomingStep", "export_step", "import_steps", "open_source"]
