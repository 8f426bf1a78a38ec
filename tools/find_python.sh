#!/bin/sh
# Print the path of a Python >= 3.12 that can make virtual environments, or say how to get one.
# A name on PATH is not enough: pyenv puts shims there that refuse to run, so every candidate is run.
for candidate in "$PYTHON" python3.12 python3.13 python3 \
    "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python /usr/local/bin/python3.1[2-9] \
    /usr/bin/python3.1[2-9] /opt/*/bin/python3.1[2-9] "$HOME"/.local/bin/python3.1[2-9] \
    "$HOME"/miniconda3/bin/python3 "$HOME"/miniforge3/bin/python3; do
    [ -n "$candidate" ] || continue
    path=$("$candidate" -c 'import sys
if sys.version_info >= (3, 12):
    import ensurepip, venv
    print(sys.executable)' 2>/dev/null) || continue
    [ -n "$path" ] && echo "$path" && exit 0
done
echo "make: no Python >= 3.12 with the venv module found (looked on PATH, in pyenv, /usr, /opt and" \
    "~/.local); install one, for example with 'pyenv install 3.12', or name it: make PYTHON=/path" >&2
exit 1
