"""Write the schema of the chart's values: its own, with that of a `PigouFleet` made of its types.

python -m tools.chart_values
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from pigou.fleet.kubernetes.fleet_spec import FleetSpec

PATH = Path(__file__).parents[1] / "deploy" / "helm" / "pigou" / "values.schema.json"


def schema(text: str) -> str:
    """Return a schema whose definitions are renewed, as JSON."""
    values: dict[str, Any] = json.loads(text)
    values["properties"]["fleet"]["properties"]["spec"] = {"$ref": "#/$defs/FleetSpec"}
    values["$defs"] = _bare(msgspec.json.schema(FleetSpec)["$defs"])
    return json.dumps(values, indent=1) + "\n"


def _bare(value: Any) -> Any:
    """Return a schema without its prose."""
    if isinstance(value, list):
        return [_bare(item) for item in value]
    if not isinstance(value, dict):
        return value
    prose = [key for key in ("title", "description") if isinstance(value.get(key), str)]
    return {key: _bare(item) for key, item in value.items() if key not in prose}


def main() -> None:
    """Renew the file."""
    PATH.write_text(schema(PATH.read_text()))


if __name__ == "__main__":
    main()
