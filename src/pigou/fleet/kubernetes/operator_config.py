"""Options of `pigou operator`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pigou.config import ConfigError
from pigou.config_option import option
from pigou.logs import LogFormatOption, LogLevelOption


class OperatorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `pigou operator`."""

    namespace: Annotated[str, option("Of the fleets; empty for all namespaces.", "Operator")] = ""
    interval: Annotated[
        float, option("Seconds between two rounds without any event.", "Operator")
    ] = 10.0
    liveness: Annotated[
        str, option("URL of its own health check, as http://0.0.0.0:8080/healthz.", "Operator")
    ] = ""

    definitions: Annotated[
        bool,
        option("Print the definitions (CRD) of its objects, for `kubectl apply`.", "Operator"),
    ] = False
    log_format: LogFormatOption = "text"
    log_level: LogLevelOption = "info"

    def __post_init__(self) -> None:
        if not 0 < self.interval <= 3600:
            raise ConfigError(f"interval is {self.interval}; it must be above 0, up to 3600 s")
