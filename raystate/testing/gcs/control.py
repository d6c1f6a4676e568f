"""The handle on a running server: faults, counts, log, settings, buckets. From any process, over HTTP, with the standard library alone."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from raystate.core.formats.errors import ConfigError, StorageError
from raystate.testing.gcs.counts import Counts, LoggedRequest
from raystate.testing.gcs.faults import FaultRule, Rules, parse_rules
from raystate.waits import LONGEST_S


class GcsControl:
    """Controls the server at `url`; any number may, from any process.

    Args:
        url: as the server prints it, such as `http://127.0.0.1:4480`.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    def environment(self) -> dict[str, str]:
        """The environment in which google-cloud-storage, gcsfs and TensorStore use this server. See the package for when each reads it."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    # ------------------------------------------------------------ faults

    def faults(self, rules: Rules | str) -> None:
        """Put rules in force instead of those of now.

        Args:
            rules: `FaultRule`s, mappings with their fields, or their JSON.

        Raises:
            ConfigError: a rule is bad; names rule and field.
        """
        checked = parse_rules(rules)
        self._call("PUT", "faults", [rule.model_dump(exclude_unset=True) for rule in checked])

    def clear(self) -> None:
        """No faults any more. Requests that stall are cut."""
        self.faults([])

    def hits(self) -> list[int]:
        """How many requests each rule in force has acted on."""
        return self._call("GET", "faults")["hits"]

    @contextmanager
    def outage(self, status: int = 503) -> Iterator[None]:
        """Every request fails with `status`; afterwards there are no faults at all."""
        self.faults([FaultRule(mode="outage", status=status)])
        try:
            yield
        finally:
            self.clear()

    # ------------------------------------------------------------ counts

    def counts(self) -> Counts:
        """What was asked of the server since its start or since `reset_counts`."""
        return _counts(self._call("GET", "counts"))

    def reset_counts(self) -> Counts:
        """Begin to count anew; returns the counts up to now."""
        return _counts(self._call("DELETE", "counts"))

    def log(self, last: int | None = None) -> list[LoggedRequest]:
        """The newest operations in the order in which they ended; at most `last`, and never more than the 10,000 that are kept."""
        entries = [LoggedRequest(**entry) for entry in self._call("GET", "log")]
        return entries if last is None else entries[max(0, len(entries) - last) :]

    # ------------------------------------------------------------ settings

    def set_strict(self, strict: bool) -> None:
        """Whether preconditions count. False shows that a test can see a server that ignores them."""
        self._call("PUT", "settings", {"strict": strict})

    def limit_writes(self, per_object_s: float | None) -> None:
        """Refuse with 429 to change one name more often than this per second; None: no limit. Cloud Storage's is 1."""
        self._call("PUT", "settings", {"writes_per_object_s": per_object_s})

    def create_bucket(self, name: str) -> None:
        """Create a bucket, past all faults; one that exists is fine.

        Raises:
            ConfigError: the name is not allowed: 3 to 63 characters, lower case.
        """
        self._call("PUT", "buckets", {"name": name})

    def delete_bucket(self, name: str) -> None:
        """Delete a bucket with everything in it, past all faults; one that is missing is fine."""
        self._call("DELETE", "buckets", {"name": name})

    # ------------------------------------------------------------ inside

    def _call(self, method: str, control: str, value: Any = None) -> Any:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=LONGEST_S)
        try:
            connection.request(method, f"/_raystate/{control}", body=None if value is None else json.dumps(value))
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise StorageError(
                f"{method} {control} of the local Cloud Storage server at {self.url} failed: {error!r}",
                operation=control,
                path=self.url,
            ) from error
        finally:
            connection.close()
        if response.status != 200:
            raise ConfigError(answer["message"], field=answer["field"])
        return answer


def _counts(value: Mapping[str, Any]) -> Counts:
    return Counts(**{**value, "statuses": {int(status): number for status, number in value["statuses"].items()}})
