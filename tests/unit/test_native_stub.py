"""The stub of the native module has the module's names, and its calls take as many arguments."""

import ast
import inspect
import re
from pathlib import Path
from types import GetSetDescriptorType

import pytest

import qflash
from qflash import _native

STUB = ast.parse((Path(qflash.__file__).parent / "_native.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
VALUES = {node.target.id: node for node in STUB.body if isinstance(node, ast.AnnAssign)}
METHODS = {
    f"{name}.{method.name}": method
    for name, node in CLASSES.items()
    for method in node.body
    if isinstance(method, ast.FunctionDef)
}
WITHOUT_XLA = not hasattr(_native, "xla_targets")  # built without jaxlib's headers


def is_public(name: str) -> bool:
    return not name.startswith("_")


def needs_xla(name: str) -> bool:
    return "xla" in name


def test_names_are_those_of_the_module():
    stub = {*CLASSES, *FUNCTIONS, *VALUES}
    if WITHOUT_XLA:
        stub = {name for name in stub if not needs_xla(name)}
    assert stub == set(filter(is_public, dir(_native)))


@pytest.mark.parametrize("name", CLASSES)
def test_members_are_those_of_the_class(name):
    special = ("__init__", "__new__", "__call__")
    own = {member for member in vars(getattr(_native, name)) if is_public(member) or member in special}
    assert {method.partition(".")[2] for method in METHODS if method.startswith(f"{name}.")} == own


@pytest.mark.parametrize("name", VALUES)
def test_values_have_the_kind_that_is_written(name):
    if WITHOUT_XLA and needs_xla(name):
        pytest.skip("the module was built without jaxlib's headers")
    kind = re.fullmatch(r"Final\[(\w+).*\]", ast.unparse(VALUES[name].annotation)).group(1)
    assert type(getattr(_native, name)).__name__ == kind


def parameters(node: ast.FunctionDef) -> list[str]:
    """As pybind11 tells them: those without a keyword are called arg0, arg1, ..."""
    bare = [arg for arg in node.args.posonlyargs if arg.arg != "self"]
    names = [f"arg{i}" for i in range(len(bare))]
    names += [arg.arg for arg in node.args.args if arg.arg not in ("self", "cls")]
    return [*names, f"*{node.args.vararg.arg}"] if node.args.vararg else names


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_parameters_are_those_of_the_binding(name):
    if WITHOUT_XLA and needs_xla(name):
        pytest.skip("the module was built without jaxlib's headers")
    owner, _, method = name.rpartition(".")
    bound = getattr(getattr(_native, owner) if owner else _native, method)
    if isinstance(bound, (property, GetSetDescriptorType)):
        assert ast.unparse(METHODS[name].decorator_list[0]) == "property"
        return
    if owner == "Call":  # a type of CPython's, whose own signature says what it is made of
        told = list(inspect.signature(_native.Call).parameters) if method == "__new__" else ["*args"]
        assert parameters(METHODS[name]) == told
        return
    signature = re.match(rf"{method}\((.*)\) -> ", bound.__doc__).group(1)
    told = [part.partition(":")[0] for part in signature.split(", ") if part]
    assert parameters({**FUNCTIONS, **METHODS}[name]) == [part for part in told if part != "self"]
