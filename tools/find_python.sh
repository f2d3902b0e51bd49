#!/bin/sh
# Prints the path of the interpreter behind a name, or nothing and fails: python3.12, a path, ...
#
# It ignores an activated virtual environment, and a shim of pyenv, which refuses a version that is
# installed but not selected.
real='import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))'

"$1" -c "$real" 2>/dev/null && exit
command -v pyenv >/dev/null || exit 1
for version in $(pyenv versions --bare | grep "^${1#python}\(\.\|\$\)" | sort -Vr); do
    "$(pyenv root)/versions/$version/bin/python" -c "$real" 2>/dev/null && exit
done
exit 1
