"""Set the marks of `_marks` when this module is imported: a compiler traces no import."""

from ._marks import set_marks

set_marks()
