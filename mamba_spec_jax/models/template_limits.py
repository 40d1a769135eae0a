"""Limits of what a chat template may compute: it comes with a checkpoint, and may loop or grow without end.

The template's syntax tree is changed before it is compiled: every loop, macro and block counts its passes, and every
expression that can make something large is charged with the size of its result. What is known to be large beforehand
(a product, a width, a replacement) is refused before it is computed. There are no signals, so that it works in threads.
"""

import contextlib
import contextvars
import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_TEXT = 2**18  # characters of a template; published ones have up to 2**15
_MOST_SECONDS = 1.0  # of the thread's own time
_MOST_SIZE = 2**25  # characters of all that one rendering makes, intermediate results included
_PER_ELEMENT = 64  # characters that an element of a list counts as
_MOST_NUMBER = 10**6  # given to a filter or a method of a text
_MOST_BITS = 2**14  # of a product or a power
# Not used by chat templates; their time or size depends on their input in ways that are not charged.
_REMOVED_FILTERS = ("filesizeformat", "pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_UNCHECKED_FILTERS = ("default", "d")
# A width or precision of five digits, or one that the arguments give: in `%` formats, and in those of `str.format`.
_WIDTHS = (
    re.compile(r"%(\([^)]*\))?[-+ #0]*(\*|\d{5}|\d*\.(\*|\d{5}))"),
    re.compile(r"\{[^{}]*(\{|:[^{}]*\d{5})"),
)

_budget: contextvars.ContextVar["_Budget"] = contextvars.ContextVar("template budget")


class LimitExceeded(Exception):
    """A template needs more time or text than any honest one."""


class _Budget:
    """What is left of one rendering's time and size."""

    def __init__(self) -> None:
        self.deadline = time.thread_time() + _MOST_SECONDS
        self.size = _MOST_SIZE

    def step(self, size: int = 0) -> None:
        self.size -= size
        if self.size < 0:
            raise LimitExceeded(f"it makes more than {_MOST_SIZE} characters of text")
        if time.thread_time() > self.deadline:
            raise LimitExceeded(f"it takes more than {_MOST_SECONDS} s")


@contextlib.contextmanager
def limited() -> Iterator[Callable[[int], None]]:
    """Gives the templates rendered within one budget; yields what charges it with characters."""
    token = _budget.set(_Budget())
    try:
        yield _step
    finally:
        _budget.reset(token)


class LimitedSandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with limits of time and size; render within `limited()`."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self, **options: Any) -> None:
        # Unoptimised, or constants would be computed while the template is compiled.
        super().__init__(optimized=False, **options)
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: limited_filter(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.count_step = _step
        self.charge = _charge

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            if _bits(left) * abs(right) > _MOST_BITS:
                raise LimitExceeded("it computes a power with too many digits")
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """`str.format` and `format_map` when a template names them, which jinja2 replaces by its own functions."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_widths(value.__self__)
        return wrapped

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str | bytes):
            _check_text_method(function.__name__, owner, args, options)
        return super().call(context, function, *args, **options)


class _Counting(NodeTransformer):
    """Adds the calls that count passes and charge sizes."""

    def _counted(self, node: Any) -> Any:
        text = sum(len(data.data) for child in node.body for data in _text_of(child))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("count_step", nodes.Const(text))).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = visit_FilterBlock = _counted

    def _charged(self, node: Any) -> Any:
        self.generic_visit(node)
        return _call("charge", node).set_lineno(node.lineno)

    visit_Concat = visit_Add = visit_Mul = visit_Mod = visit_Call = visit_List = visit_Dict = _charged

    def visit_Tuple(self, node: nodes.Tuple) -> Any:
        return self._charged(node) if node.ctx == "load" else node

    def visit_Output(self, node: nodes.Output) -> Any:
        self.generic_visit(node)
        node.nodes = [each if isinstance(each, nodes.TemplateData) else _call("charge", each) for each in node.nodes]
        return node


def limited_filter(name: str, function: Callable) -> Callable:
    """A filter whose arguments are checked and whose result is charged."""

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        if name not in _UNCHECKED_FILTERS:
            _check_numbers(name, (*args, *options.values()))
        # The first argument may be the context or the environment.
        values = [value for value in args if isinstance(value, str | list | tuple | Mapping)]
        if name == "replace":
            _check_replacement(*map(str, values[:3]))
        elif name == "join":
            separator = args[2] if len(args) > 2 else options.get("d", "")
            return _charge(function(args[0], list(_each(args[1], len(str(separator)))), *args[2:], **options))
        elif name == "format" and values:
            _check_widths(str(values[0]))
        elif name == "indent" and values:
            _step(
                str(values[0]).count("\n") * max((_width(value) for value in (*args[1:], *options.values())), default=4)
            )
        result = function(*args, **options)
        return _each(result, 1) if isinstance(result, Iterator) else _charge(result)

    return checked


def _step(size: int = 0) -> None:
    _budget.get().step(size)


def _charge(value: Any) -> Any:
    """The value, whose size, what it holds included, is taken off the budget."""
    budget = _budget.get()
    if isinstance(value, str | bytes):
        budget.step(len(value))
        return value
    todo = [value] if isinstance(value, list | tuple | Mapping | Namespace) else []
    while todo:
        item = todo.pop()
        if isinstance(item, str | bytes):
            budget.step(len(item))
        elif isinstance(item, Mapping | Namespace | list | tuple):
            if isinstance(item, Namespace):
                item = object.__getattribute__(item, "_Namespace__attrs")
            budget.step(_PER_ELEMENT * len(item))
            todo.extend(item.values() if isinstance(item, Mapping) else item)
    budget.step()
    return value


def _each(values: Any, size: int) -> Iterator[Any]:
    for value in values:
        _step(size + _PER_ELEMENT)
        yield value


def _text_of(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


def _call(name: str, argument: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), [argument], [], None, None)


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _width(value: Any) -> int:
    return len(value) if isinstance(value, str) else value if isinstance(value, int) else 0


def _check_product(left: Any, right: Any) -> None:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
            unit = 1 if isinstance(sequence, str | bytes) else _PER_ELEMENT
            _step(len(sequence) * max(count, 0) * unit)
            return
    if _bits(left) + _bits(right) > _MOST_BITS:
        raise LimitExceeded("it computes a product with too many digits")


def _check_numbers(name: str, values: Any) -> None:
    for value in values:
        if isinstance(value, int | float) and not abs(value) <= _MOST_NUMBER:
            raise LimitExceeded(f"it asks {name} for {value:.3g}, expected at most {_MOST_NUMBER}")


def _check_widths(form: str) -> None:
    plain = form.replace("{{", "").replace("}}", "")  # braces that are written, not filled in
    if any(width.search(text) for width, text in zip(_WIDTHS, (form, plain), strict=True)):
        raise LimitExceeded("it formats with a width of more than four digits")


def _check_replacement(text: str, old: str = "", new: str = "") -> None:
    found = text.count(old) if old else len(text) + 1
    _step(len(text) + found * len(new))


def _check_text_method(name: str, owner: Any, args: tuple, options: Mapping) -> None:
    values = (*args, *options.values())
    _check_numbers(name, values)
    if name == "replace":
        _check_replacement(owner, *args[:2])
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _step(len(owner) * len(args[0]))
    elif name == "expandtabs":
        _step(owner.count("\t") * max((abs(value) for value in values), default=8))
    elif name == "translate":
        raise LimitExceeded("it calls translate, which chat templates have no use for")
