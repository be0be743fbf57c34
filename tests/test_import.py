"""What `import quant_gru` imports, and when."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quant_gru
from quant_gru.torch_ops import on_import

SOURCE = Path(quant_gru.__file__).parents[1]


def fresh(code: str) -> str:
    """Run code in a new process, and return what it prints."""
    path = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", path + code], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("code", ["import quant_gru", "import quant_gru.cli"])
def test_torch_is_not_imported(code: str) -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'rich'}"
    assert fresh(f"{code}; print({heavy} & {{*sys.modules}})") == "set()"


def test_a_configuration_needs_no_torch() -> None:
    code = "import quant_gru; quant_gru.QuantConfig.int8(); print('torch' in sys.modules)"
    assert fresh(code) == "False"


def test_the_compiler_is_not_imported_until_something_is_compiled() -> None:
    """It takes as long to import as torch itself."""
    code = "import actnn; actnn.estimate, actnn.compress; print('torch._inductor' in sys.modules)"
    assert fresh(code) == "False"


def test_operators_exist_once_torch_is_imported_after_the_package() -> None:
    """Programs of torch.export need them, and nothing else of the package."""
    code = """
import quant_gru, importlib.util, inspect
assert importlib.util.find_spec("torch")  # as libraries do to see whether it is installed
assert "torch" not in sys.modules
import torch
inspect.getsource(torch)
assert not any("on_import" in str(type(finder)) for finder in sys.meta_path)
print(torch.ops.quant_gru.forward)
"""
    assert fresh(code) == "quant_gru.forward"


def test_operators_exist_if_torch_is_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(on_import, "import_module", imported.append)
    on_import.register_with_torch()
    assert imported == ["quant_gru.torch_ops.operators"]


def test_registration_waits_for_modules_that_are_partly_imported() -> None:
    code = "import quant_gru; import quant_gru.integer.quantizer as q; print(q.Quantizer.__name__)"
    assert fresh(code) == "Quantizer"


def test_other_imports_pass_the_finder() -> None:
    assert on_import._AfterTorch().find_spec("numpy") is None
    before = list(sys.meta_path)
    on_import.register_with_torch()  # torch is imported already
    assert sys.meta_path == before


def test_all_names_by_star() -> None:
    names: dict[str, object] = {}
    exec("from quant_gru import *", names)
    assert set(quant_gru.__all__) <= set(names)
    assert names["QuantGRU"] is quant_gru.QuantGRU


def test_dir_names_everything_before_its_first_use() -> None:
    for package in ("quant_gru", "actnn"):
        code = f"import {package} as package; print(dir(package) == sorted(package.__all__))"
        assert fresh(code) == "True"


def test_every_name_has_one_home() -> None:
    for name, home in quant_gru._HOMES.items():
        assert getattr(sys.modules[f"quant_gru.{home}"], name) is getattr(quant_gru, name)
    assert set(quant_gru._HOMES) < set(quant_gru.__all__)


def test_type_checkers_see_the_same_names() -> None:
    """The imports under TYPE_CHECKING name what `__getattr__` imports, from the same modules."""
    import ast

    tree = ast.parse(Path(quant_gru.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: f"quant_gru.{home}" for name, home in quant_gru._HOMES.items()}


def test_unknown_names_and_subpackages() -> None:
    with pytest.raises(AttributeError, match="module 'quant_gru' has no attribute 'QuantLSTM'"):
        quant_gru.QuantLSTM  # noqa: B018
    assert not hasattr(quant_gru, "_none")
    with pytest.raises(ImportError):
        exec("from quant_gru import nothing")
    assert quant_gru.config.OPERATORS[0] == "input.x"


def test_pickling() -> None:
    for name in quant_gru.__all__:
        value = getattr(quant_gru, name)
        assert pickle.loads(pickle.dumps(value)) == value
    blob = pickle.dumps(quant_gru.QuantGRU(3, 4))
    code = f"import pickle; print(type(pickle.loads({blob!r})).__name__)"
    assert fresh(code) == "QuantGRU"
    assert type(pickle.loads(blob)) is quant_gru.QuantGRU
    assert torch.equal(pickle.loads(blob).weight_hh_l0, pickle.loads(blob).weight_hh_l0)


def test_a_missing_native_module_is_named() -> None:
    code = """
import sys
for package in ("quant_gru.kernels", "quant_gru.kernel_runtime"):
    for name in [name for name in sys.modules if name.partition(".")[0] == "quant_gru"]:
        del sys.modules[name]
    sys.modules[f"{package}._native"] = None  # as if the file were missing
    try:
        from quant_gru import QuantGRU
    except ImportError as error:
        print(error)
"""
    messages = fresh(code).splitlines()
    assert len(messages) == 2
    for message in messages:
        assert "Expected the compiled module quant_gru.kernels._native, got" in message
        assert "--force-reinstall" in message


def test_dir_shows_public_names_only():
    import actnn

    for module in (quant_gru, actnn, actnn.ops):
        assert dir(module) == sorted(module.__all__)
