"""Set the marks of `_compiler` when this module is imported: a compiler traces no import."""

from ._compiler import set_marks

set_marks()
