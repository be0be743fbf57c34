"""Print the JSON Schema of the configuration file: ``python -m quant_gru.config``."""

import json

from quant_gru.config.schema import file_json_schema

if __name__ == "__main__":
    print(json.dumps(file_json_schema(), indent=2))
