"""Set the marks of `_marks` when this module is imported: a compiler traces no import."""

from . import _marks

waiting, _marks.waiting = _marks.waiting or (), None
for mark in waiting:
    mark()
