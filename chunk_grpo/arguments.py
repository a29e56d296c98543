"""Check the arguments of functions that scripts call against the annotations, before anything else is done."""

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import linecache
import reprlib
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from . import InputError

Called = TypeVar("Called", bound=Callable)
Allowed = Any  # a type, written as an annotation


def int_at_least(
    low: int,  # the smallest number allowed
    description: str = "",  # text for error messages; empty: "a whole number from `low`"
) -> Allowed:
    """Return a type annotation for whole numbers of at least `low`."""
    from pydantic import Field

    return Annotated[int, Field(ge=low), description or f"a whole number from {low}"]


def number(
    above: float | None = None,  # lower limit that is not allowed itself; None: no such limit
    low: float | None = None,  # the smallest number allowed; None: no such limit
    high: float | None = None,  # the largest number allowed; None: no upper limit
) -> Allowed:
    """Return a type annotation for finite numbers between limits."""
    from pydantic import Field

    all_limits = {"gt": above, "ge": low, "le": high}
    phrases = {"gt": "above", "ge": "of at least", "le": "of at most"}
    limits = {name: limit for name, limit in all_limits.items() if limit is not None}
    limits_text = " and ".join(f"{phrases[name]} {limit:g}" for name, limit in limits.items())
    return Annotated[float, Field(**limits), f"a finite number {limits_text}".strip()]


def texts(
    min_count: int = 0,  # smallest number of texts, 0 or 1
) -> Allowed:
    """Return a type annotation for lists of texts that are not empty."""
    from pydantic import Field

    description = "a list of texts that are not empty"
    if min_count:
        description += ", at least one"
    return Annotated[
        Sequence[Annotated[str, Field(min_length=1)]],
        Field(min_length=min_count),
        description,
    ]


def some(
    base_type: Allowed,  # type of the values
    description: str,  # text for error messages
    condition: Callable[[Any], bool],  # returns True for a value that is allowed
) -> Allowed:
    """Return a type annotation for the values of a type that satisfy a condition."""
    from pydantic import AfterValidator

    def check(value):
        """Return the value; raise ValueError if it does not satisfy the condition."""
        if not condition(value):
            raise ValueError(description)
        return value

    return Annotated[base_type, AfterValidator(check), description]


def text() -> Allowed:
    """Return a type annotation for texts that are not empty."""
    return some(str, "a text that is not empty", lambda value: bool(value.strip()))


def path() -> Allowed:
    """Return a type annotation for paths, each a text that is not empty or a Path."""
    return some(str | Path, "a path that is not empty", lambda value: bool(str(value).strip()))


def paths() -> Allowed:
    """Return a type annotation for lists of at least one path."""
    return some(
        Sequence[str | Path],
        "a list of paths, at least one",
        lambda value: len(value) and all(map(str, value)),
    )


def _describe_type(
    allowed: Allowed,  # a type annotation
) -> str:
    """Describe a type in words, for error messages."""
    origin = typing.get_origin(allowed)
    parts = typing.get_args(allowed)
    if origin is Annotated:
        description = next((part for part in parts[1:] if isinstance(part, str)), "")
        return description or _describe_type(parts[0])
    if origin in (Union, types.UnionType):
        choices = list(dict.fromkeys(_describe_type(part) for part in parts))
        if len(choices) == 1:
            return choices[0]
        return ", ".join(choices[:-1]) + f" or {choices[-1]}"
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if origin is tuple:
        return "a tuple"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        elements = {str: " of texts", int: " of whole numbers", float: " of finite numbers"}
        return "a list" + elements.get(parts[0], "")
    if origin is not None or allowed is Callable:
        return "a function"
    known = {
        int: "a whole number",
        float: "a finite number",
        bool: "True or False",
        str: "a text",
        Path: "a path",
        type(None): "None",
        None: "None",
        Any: "anything",
        Mapping: "a mapping",
        Sequence: "a list",
    }
    if isinstance(allowed, typing.Hashable) and allowed in known:
        return known[allowed]
    return f"a {getattr(allowed, '__name__', allowed)}"


def _describe_value(value: Any) -> str:
    """Describe a value in one line, for error messages: a tensor by its shape and type, other values in 80 characters."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


class _NoArgument:
    """A type that no argument has."""


def _accept_instances(
    allowed: Allowed,  # a type annotation
) -> Allowed:
    """Make a type annotation accept pydantic models and dataclasses without validating their fields again."""
    from pydantic import BaseModel, InstanceOf

    if isinstance(allowed, type) and (
        issubclass(allowed, BaseModel) or dataclasses.is_dataclass(allowed)
    ):
        return InstanceOf[allowed]
    if typing.get_origin(allowed) in (Union, types.UnionType):
        return Union[tuple(_accept_instances(part) for part in typing.get_args(allowed))]  # noqa: UP007
    return allowed


def _build_validators(
    called: Callable,  # the function whose arguments are checked
    explicit_types: Mapping[str, Allowed],  # parameter -> type that replaces its annotation
) -> dict[str, tuple[Callable, Allowed]]:  # parameter -> (function that raises, type)
    """Build a validator for each argument of a function, which raises ValidationError for a wrong value."""
    from pydantic import ConfigDict, TypeAdapter

    config = ConfigDict(arbitrary_types_allowed=True, strict=True, allow_inf_nan=False)
    hints = typing.get_type_hints(called, include_extras=True)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [
        name
        for name, parameter in inspect.signature(called).parameters.items()
        if parameter.kind not in variadic
    ]
    validators = {}
    for name in dict.fromkeys([*names, *explicit_types]):
        allowed = explicit_types[name] if name in explicit_types else hints.get(name, Any)
        if inspect.isfunction(allowed):  # it makes the type with the help of a later import
            allowed = allowed()
        # pydantic accepts a configuration for a union, but not for every single class.
        schema = _accept_instances(allowed) | _NoArgument
        validators[name] = (TypeAdapter(schema, config=config).validator.validate_python, allowed)
    return validators


def _call_error(
    called: Callable,  # the function
    name: str,  # name of the function, for the error message
    args: tuple,  # positional arguments of the call
    kwargs: dict,  # keyword arguments of the call
) -> InputError | None:  # None: the call fits the signature
    """Return an error that says which arguments of a call are missing or not in the signature."""
    signature = inspect.signature(called)
    positional_only = {
        key
        for key, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
    }
    keywords = {key: value for key, value in kwargs.items() if key not in positional_only}
    try:
        signature.bind(*args, **keywords)
        return None
    except TypeError as error:
        reason = str(error)
    names = [key for key in signature.parameters if key not in ("self", "cls")]
    has_variadic_keywords = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in signature.parameters.values()
    )
    for key in () if has_variadic_keywords else kwargs:
        if key not in names:
            similar = difflib.get_close_matches(key, names, 1, 0.5)
            if similar:
                hint = f"did you mean `{similar[0]}`?"
            else:
                hint = f"it takes {', '.join(names) or 'none'}"
            return InputError(f"`{key}` is no argument of {name}; {hint}")
    return InputError(f"{name} takes {', '.join(names) or 'no argument'}; {reason}")


def _comments_by_line(
    source: str,  # Python code
) -> tuple[dict[int, str], set[int]]:  # line number -> comment; lines with only a comment
    """Return the comments in Python code, and the numbers of the lines that hold nothing else."""
    comments = {}
    alone = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            comments[row] = token.string.lstrip("# ")
            if not token.line[:column].strip():
                alone.add(row)
    return comments, alone


def _signature_source(called: Callable) -> str:
    """Return the source of a function's signature, with `pass` as the body; raise OSError if there is none.

    Reading the signature alone takes a twentieth of the time that `inspect.getsource` takes.
    """
    code = called.__code__
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), None)
    if start is None:
        raise OSError("no source")
    indent = lines[start][: -len(lines[start].lstrip())]
    signature = []
    for line in lines[start:]:
        signature.append(line)
        code_part = line.partition("  #")[0].rstrip()
        is_last = line.startswith((f"{indent}def ", f"{indent})")) and code_part.endswith(":")
        if is_last:
            return textwrap.dedent("".join(signature)) + "    pass\n"
    raise OSError("no end of the signature")


def describe_parameters(called: Callable) -> str:
    """Format the comments on a function's parameters and result as sections of a docstring.

    The comment on a parameter is on its line, or on the lines above it. Returns an empty text if the source cannot be
    read.
    """
    try:
        source = _signature_source(called)
        (definition,) = ast.parse(source).body
        comments, alone = _comments_by_line(source)
    except (OSError, SyntaxError, ValueError, tokenize.TokenError):
        return ""
    if not isinstance(definition, ast.FunctionDef):
        return ""
    arguments = definition.args
    lines = []
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        text = comments.get(argument.lineno, "")
        row = argument.lineno - 1
        above: list[str] = []
        while not text and row in alone:
            above.insert(0, comments[row])
            row -= 1
        text = (text or " ".join(above)).removeprefix(f"{argument.arg}: ")
        if text:
            lines.append(f"    {argument.arg}: {text}")
    section = "\n".join(["Args:", *lines]) if lines else ""
    # A comment on the line of a parameter describes the parameter, not the result.
    result = ""
    if definition.returns and definition.returns.end_lineno not in {
        argument.lineno for argument in arguments.args
    }:
        result = comments.get(definition.returns.end_lineno, "")
    if result:
        section += f"\n\nReturns:\n    {result}" if section else f"Returns:\n    {result}"
    return section


def checked(
    # each gets all arguments by name and returns an error sentence if they contradict each other
    *rules: Callable[[Mapping[str, Any]], str | None],
    # parameter -> type that replaces its annotation, or a function that returns the type
    **explicit_types: Allowed,
) -> Callable[[Called], Called]:
    """Make a decorator that checks arguments and raises InputError with the argument, its value and what is allowed.

    Annotations are read strictly: 1.0 and True are not whole numbers, and a text is not a list of letters. The check
    takes a few microseconds, so it is meant for functions that users call, not for the inside of a forward pass. For
    a class, the arguments of its constructor are checked.
    """

    def decorate(called):
        if isinstance(called, type):
            called.__init__ = checked(*rules, **explicit_types)(called.__init__)
            return called
        name = called.__qualname__.removesuffix(".__init__")
        parameters = inspect.signature(called).parameters
        positional_only = {
            key
            for key, parameter in parameters.items()
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        }
        names = [
            key
            for key, parameter in parameters.items()
            if key in positional_only or parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        required = [key for key in names if parameters[key].default is inspect.Parameter.empty]
        validators: dict[str, tuple[Callable, Allowed]] = {}  # filled by the first call

        def find_error(args: tuple, kwargs: dict) -> InputError | None:
            """Return the error for the first wrong argument of a call; None if all are right."""
            if not validators:
                validators.update(_build_validators(called, explicit_types))
            all_kwargs = kwargs
            if positional_only:  # a keyword of such a name belongs to the function's own **kwargs
                kwargs = {key: value for key, value in kwargs.items() if key not in positional_only}
            # This test is faster than binding the signature, which only a suspicious call needs.
            if (
                len(args) > len(names)
                or len(args) + len(kwargs) < len(required)
                or not kwargs.keys() <= validators.keys()
                or required[len(args) :]
                and not kwargs.keys() >= {*required[len(args) :]}
                or not kwargs.keys().isdisjoint(names[: len(args)])
            ):
                error = _call_error(called, name, args, all_kwargs)
                if error:
                    return error
            arguments = dict(zip(names, args, strict=False)) | kwargs
            for key, value in arguments.items():
                if key not in validators:  # it belongs to the function's own **kwargs
                    continue
                validate, allowed = validators[key]
                try:
                    validate(value)
                except Exception:  # ValidationError, or anything that a strange object raises
                    return InputError(
                        f"`{key}` of {name} must be {_describe_type(allowed)}; got {_describe_value(value)}"
                    )
            for rule in rules:
                message = rule(arguments)
                if message:
                    return InputError(message)
            return None

        @functools.wraps(called)
        def with_check(*args, **kwargs):
            error = find_error(args, kwargs)
            if error:
                raise error
            return called(*args, **kwargs)

        section = describe_parameters(called)
        if section:
            with_check.__doc__ = f"{inspect.getdoc(called) or ''}\n\n{section}\n"
        return with_check

    return decorate
