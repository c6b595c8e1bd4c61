"""The JSON Schema of `report.json`, derived from the values that it is read into.

`python -m conformance.report.schema` prints it.
"""

import json
from typing import Any

import msgspec

from conformance.run.report import SCHEMA_VERSION, Report


def report_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12) that every report of this schema version satisfies."""
    _, definitions = msgspec.json.schema_components([Report], ref_template="#/$defs/{name}")
    for one in definitions.values():
        one["description"] = one.get("description", "").partition("\n\n")[0].replace("\n", " ")
        if "properties" in one:
            one["additionalProperties"] = False
    root = definitions.pop(Report.__name__)
    root["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    schema = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": schema, **root, "title": "Report of ddp-conformance", "$defs": definitions}


if __name__ == "__main__":
    print(json.dumps(report_schema(), indent=1))
