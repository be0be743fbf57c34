"""Says whether an installation is good: python tools/check.py runs 300 tests, in under a minute.

They test the packages that this Python imports, an installed wheel or a source tree: every executor
of this processor against the definition, streams, and the codec of actnn. They need pytest,
pytest-xdist and hypothesis (the extra `check`).
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (
    "test_import.py",
    "gru/test_definition.py",
    "gru/test_stream.py",
    "gru/test_custom_gru.py",
    "kernels/test_native_stack.py",
    "actnn/codec/test_codec_executors.py",
)


def main() -> int:
    """Run the tests, and return pytest's exit status."""
    spec = find_spec("quant_gru")
    if spec is None or spec.origin is None:
        print("Expected quant_gru to be installed, got no such module")
        return 1
    print(f"== Checking {Path(spec.origin).parent} with 300 tests: under a minute", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "not slow"]
    command += ["-p", "no:cacheprovider", *(f"tests/{each}" for each in TESTS), *sys.argv[1:]]
    # the tests import what this Python has installed, whatever PYTHONPATH names
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
