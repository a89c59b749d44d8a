"""Private names of torch: all in one module."""

import ast
from pathlib import Path

import pytest
import torch
import wavepe
from wavepe.ops import _torch_private

PACKAGE = Path(wavepe.__file__).parent
KEEPERS = {
    name
    for owner in (torch.Tensor, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    for name in (*dir(owner), *getattr(owner, "__annotations__", ()))
} | {"_op", "_current_level"}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names(source):
    """Private names of torch that a module reads: imported, by a dot, or by getattr."""
    tree, of_torch, names_read = ast.parse(source), {"torch"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases = [a for a in node.names if a.name.split(".")[0] == "torch"]
            names_read += [a.name for a in aliases if any(map(is_private, a.name.split(".")))]
            of_torch |= {a.asname for a in aliases if a.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{a.name}" for a in node.names]
            names_read += [name for name in names if any(map(is_private, name.split(".")))]
            of_torch |= {a.asname or a.name for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base = ast.unparse(node.value)
            inside = base.split(".")[0] in of_torch or (base != "self" and node.attr in KEEPERS)
            names_read += [f"{base}.{node.attr}"] if inside else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            base, name = ast.unparse(node.args[0]), node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value):
                inside = base.split(".")[0] in of_torch or name.value in KEEPERS
                names_read += [f"{base}.{name.value}"] if inside else []
    return names_read


def test_one_module_reads_private_names():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        of_a_wheel = file.startswith("benchmarks/")  # a folder beside the package in a source tree
        if (names := private_names(path.read_text())) and not of_a_wheel:
            found[file] = sorted(set(names))
    home = "ops/_torch_private.py"
    assert found.pop(home) == [
        "forward_ad._current_level",
        "torch._C",
        "torch._C._AutoDispatchBelowADInplaceOrView",
        "torch._C._functorch",
        "torch._C._len_torch_dispatch_stack",
        "torch._assert_async",
        "torch._check",
        "torch.utils._python_dispatch",
        "x._version",
    ]
    assert not found, f"read them in {home} only"


@pytest.mark.parametrize(
    "line",
    [
        "torch._C.x", "torch._assert_async(y)", "x._version", "op._op(x)",
        "from torch._library.autograd import Info",
        "from torch.utils._python_dispatch import _disable_current_modes",
        "from torch.autograd import forward_ad as f; f._current_level", "import torch._dynamo",
        "getattr(torch, '_assert_async')",
    ],
)  # fmt: skip
def test_the_search_finds(line):
    assert private_names(f"import torch\n{line}")


def test_the_search_knows_public_names():
    assert not private_names("import torch\nself._op = torch.ops.wavepe.x\ntorch.__version__")


def test_stamps_change_with_each_write():
    x = torch.nn.Parameter(torch.zeros(2))
    before = _torch_private.stamps([x])
    assert _torch_private.stamps([x]) == before
    with torch.no_grad():
        x += 1
    written = _torch_private.stamps([x])
    assert written != before
    x.data = x.data.clone()
    assert _torch_private.stamps([x]) != written
    assert _torch_private.stamps([x, x.detach()]) is None
    with torch.inference_mode():
        assert _torch_private.stamps([torch.nn.Parameter(torch.zeros(2))]) is None
