"""Give each parameter of a docstring its own type and default.

"first, beyond" documents two parameters in one entry. griffe gives both the annotation and the
default of the first one. A type such as "Tensor (L,), (B, L)" becomes a tuple in parentheses.
Classes of encodings are dataclasses by `register_encoding`, which griffe does not know.
"""

from griffe import (
    Class,
    Decorator,
    DocstringSectionParameters,
    ExprName,
    ExprTuple,
    Extension,
    GriffeLoader,
    Module,
    Object,
)


def correct(place: Object) -> None:
    """Correct the parameters in the docstring of a function or class, and of all that it holds."""
    parameters = getattr(place, "parameters", ())
    for section in place.docstring.parsed if place.docstring else ():
        if isinstance(section, DocstringSectionParameters):
            named = [each for each in section.value if each.name in parameters]
            signatures = {id(parameters[each.name].annotation) for each in named}
            for each in named:
                if id(each.annotation) in signatures:  # not written in the docstring
                    each.annotation = parameters[each.name].annotation
                each.value = parameters[each.name].default
            for each in section.value:
                if isinstance(each.annotation, ExprTuple):
                    each.annotation = str(each.annotation).removeprefix("(").removesuffix(")")
    for member in place.members.values():
        if not member.is_alias:
            correct(member)


class Signatures(Extension):
    """Correct the docstrings of a package before its pages are written."""

    def on_class_instance(self, *, cls: Class, **kwargs: object) -> None:
        """Make the options of an encoding the parameters of its class, as a dataclass's are."""
        if any(str(each.value) == "register_encoding" for each in cls.decorators):
            name = ExprName("dataclasses.dataclass")
            cls.decorators.append(Decorator(name, lineno=cls.lineno, endlineno=cls.lineno))

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **kwargs: object) -> None:
        """Correct the docstrings of all modules."""
        correct(pkg)
