#!/bin/bash
# Grades the repository and the agent's last words; writes /logs/verifier/reward.txt and report.json.
mkdir -p /logs/verifier
exec python3 "$(dirname "$0")/grade.py" "${REPOSITORY:-/testbed}" "${LOGS:-/logs}"
