#!/usr/bin/env bash
exec "${PY:-$TASK/control-venv/bin/python}" -m harbor_env serve "$@"
