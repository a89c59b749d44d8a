#!/bin/sh
# A compiler that leaves an object alone if it is there: run.py removes those that a fault concerns.
for word; do
    [ "$before" = -o ] && out=$word
    before=$word
done
case $out in *.o) [ -e "$out" ] && exit 0 ;; esac
exec "$@" -O1 # the last one counts
