"""Mistakes that a machine makes in the code of modules: each is one small change of one place within a function."""

import ast
import inspect
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

_PAIRS = (
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
    (ast.Add, ast.Sub), (ast.Div, ast.Mult), (ast.BitOr, ast.BitAnd), (ast.And, ast.Or),
)  # fmt: skip
_OPPOSITE: dict[type, Any] = {**dict(_PAIRS), **{second: first for first, second in _PAIRS}}
_CALLS = {"any": "all", "all": "any", "max": "min", "min": "max"}
_COPIES = frozenset(("clone", "coalesce", "detach", "to_dense"))
#: What is usually there, for values that are something else in few scenarios.
_USUAL: dict[str, Any] = {
    "root": 0, "last": 0, "num_syncing": 1, "synchronises": True, "is_ours": True, "is_last_joiner": True,
    "with_buffers": True, "divisor": 1, "_divisor": 1, "is_hooked": True, "_ignored": (),
}  # fmt: skip
_LEFT_ALONE = frozenset(("annotation", "returns", "decorator_list", "bases"))


@dataclass(frozen=True)
class Mistake:
    """One change: in which function, by which operator, what stood there, and what stands there instead.

    `lines` are the first and the last one of the statement, without those of its block. `number` counts the mistakes of
    the module.
    """

    module: str
    function: str
    lines: tuple[int, int]
    operator: str
    before: str
    after: str
    number: int

    def __str__(self) -> str:
        """Return the place and the change on one line."""
        place = f"{self.module.rpartition('.')[2]}.py:{self.lines[0]} {self.function}"
        return f"{place}: {self.operator}: {self.before} -> {self.after or 'nothing'}"

    def make(self) -> None:
        """Let the functions of the module do what the wrong ones would, wherever they were imported."""
        make(sys.modules[self.module], self.number)


def make(module: ModuleType, number: int) -> None:
    """Make the mistake of that number in a module that has been imported."""
    tree = ast.parse(inspect.getsource(module))
    spot, _, node = next(itertools.islice(_all_changes(tree), number, None))
    for made in ast.walk(node):
        ast.copy_location(made, spot.node)
    held = getattr(spot.owner, spot.field)
    new = node if spot.position is None else [*held[: spot.position], node, *held[spot.position + 1 :]]
    setattr(spot.owner, spot.field, new)
    wrong: dict[str, Any] = {"__name__": module.__name__, "__package__": module.__package__}
    exec(compile(ast.fix_missing_locations(tree), str(module.__file__), "exec", dont_inherit=True), wrong)
    right = functions_in(vars(module), module.__name__)
    for name, function in functions_in(wrong, module.__name__).items():
        right[name].__code__ = function.__code__
        if isinstance(spot.statement, ast.FunctionDef):  # else defaults are right, but of classes that were made anew
            right[name].__defaults__, right[name].__kwdefaults__ = function.__defaults__, function.__kwdefaults__


def mistakes_in(module: ModuleType) -> Iterator[Mistake]:
    """Yield all mistakes of a module, in the order of its source; none without `super()`, whose cell code must keep."""
    for number, (spot, operator, node) in enumerate(_all_changes(ast.parse(inspect.getsource(module)))):
        before, after = _text(spot.node), "" if isinstance(node, ast.Pass) else _text(node)
        first, block = spot.statement.lineno, getattr(spot.statement, "body", None)
        last = block[0].lineno - 1 if isinstance(block, list) else spot.statement.end_lineno
        if "super()" not in before or "super()" in after:
            lines = (first, max(first, last))
            yield Mistake(module.__name__, spot.function, lines, operator, before, after, number)


def functions_in(namespace: Any, module: str, prefix: str = "") -> dict[str, FunctionType]:
    """Return by name the functions that `module` defines, those of its classes and beneath decorators too."""
    found: dict[str, FunctionType] = {}
    for name, value in dict(namespace).items():
        function = getattr(value, "fget", getattr(value, "__wrapped__", value))
        if isinstance(value, type) and value.__module__ == module:
            found |= functions_in(vars(value), module, f"{prefix}{name}.")
        elif isinstance(function, FunctionType) and function.__module__ == module:
            found[prefix + name] = function
        if isinstance(setter := getattr(value, "fset", None), FunctionType):
            found[f"{prefix}{name}="] = setter
    return found


class _Spot(NamedTuple):
    owner: ast.AST
    field: str
    position: int | None
    node: Any
    function: str
    statement: Any


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(ast.fix_missing_locations(node)).split())[:160]


def _all_changes(tree: ast.Module) -> Iterator[tuple[_Spot, str, Any]]:
    for spot in _spots(tree):
        for operator, node in _changes(spot.node, spot.field):
            if ast.dump(node) != ast.dump(spot.node):  # arguments that are alike may be exchanged
                yield spot, operator, node


def _spots(owner: ast.AST, function: str = "", statement: Any = None, inside: bool = False) -> Iterator[_Spot]:
    """Yield every expression and statement within functions; not annotations, texts, and what is raised."""
    for field, value in ast.iter_fields(owner):
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if field in _LEFT_ALONE or isinstance(owner, ast.Raise) or is_text or not isinstance(node, ast.AST):
                continue
            around = node if isinstance(node, ast.stmt) else statement
            if inside and isinstance(node, ast.expr | ast.stmt):
                yield _Spot(owner, field, index, node, function, around)
            is_named = isinstance(node, ast.FunctionDef | ast.ClassDef)
            name = f"{function}.{node.name}".lstrip(".") if is_named else function
            yield from _spots(node, name, around, inside or isinstance(node, ast.FunctionDef))


def _changes(node: Any, field: str) -> Iterator[tuple[str, Any]]:
    """Yield what may stand instead of a node, each with the operator's name."""
    if field in ("test", "ifs"):
        yield "negate condition", ast.UnaryOp(ast.Not(), node)
        yield "condition is true", ast.Constant(True)
    match node:
        case (
            ast.Expr() | ast.AugAssign() | ast.For() | ast.Continue() | ast.If(orelse=[])
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
        ):  # fmt: skip
            yield "drop statement", ast.Pass()
        case ast.With():
            yield "drop the block's context", ast.If(ast.Constant(True), node.body, [])
        case ast.Return(value=ast.expr()):
            yield "return nothing", ast.Return(ast.Constant(None))
        case ast.UnaryOp(op=ast.Not()):
            yield "remove not", node.operand
        case ast.BoolOp():
            yield "and or or", ast.BoolOp(_OPPOSITE[type(node.op)](), node.values)
            for dropped in node.values:
                rest = [each for each in node.values if each is not dropped]
                yield "drop operand", ast.BoolOp(node.op, rest) if rest[1:] else rest[0]
        case ast.Compare(ops=[op, *_]) if type(op) in _OPPOSITE and field not in ("test", "ifs"):
            yield "comparison", ast.Compare(node.left, [_OPPOSITE[type(op)](), *node.ops[1:]], node.comparators)
        case ast.BinOp() if type(node.op) in _OPPOSITE:
            yield "arithmetic", ast.BinOp(node.left, _OPPOSITE[type(node.op)](), node.right)
        case ast.IfExp():
            yield from (("always this branch", branch) for branch in (node.body, node.orelse))
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Call():
            yield from _calls(node)
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()) if name in _USUAL:
            yield "the usual value", ast.Constant(_USUAL[name])
        case ast.Subscript(slice=ast.Name()) if isinstance(node.ctx, ast.Load):
            yield "the first one", ast.Subscript(node.value, ast.Constant(0), node.ctx)


def _calls(node: ast.Call) -> Iterator[tuple[str, Any]]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _CALLS:
        yield "the opposite function", ast.Call(ast.Name(_CALLS[name], ast.Load()), node.args, node.keywords)
    if any(isinstance(each, ast.Starred | ast.GeneratorExp) for each in node.args):
        return
    if node.args:
        yield "no call", node.args[0]
    if node.args[1:]:
        yield "exchange arguments", ast.Call(node.func, [*node.args[1::-1], *node.args[2:]], node.keywords)
    if isinstance(node.func, ast.Attribute) and node.func.attr in _COPIES:
        yield "no call", node.func.value
    if node.keywords and all(each.arg for each in node.keywords):
        yield "drop option", ast.Call(node.func, node.args, node.keywords[:-1])
