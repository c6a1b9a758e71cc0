"""The verifier: a reward from 0 to 1 for the repaired function and for the sentence about it.

Half is the share of checks that failed before, half the share of simple properties that the agent's last words have. A check
that passed before and fails now makes it 0.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY, LOGS = Path(sys.argv[1]), Path(sys.argv[2])
FAIL_TO_PASS = {"even": "median([1, 2, 3, 4]) == 2.5", "unsorted": "median([9, 1, 5]) == 5", "two": "median([1, 3]) == 2",
                "mixed": "median([4, 1, 3, 2]) == 2.5"}
PASS_TO_PASS = {"odd": "median([1, 2, 3]) == 2", "spread": "spread([3, 1, 2]) == 2"}


def holds(check):
    code = f"from stats import median, spread; import sys; sys.exit(0 if {check} else 1)"
    try:
        return subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, timeout=20).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def properties(text):
    words = re.findall(r"[a-z]+", text.lower())
    return {"says something": len(words) >= 3, "is short": 3 <= len(words) <= 30, "names the median": "median" in words,
            "names the middle": bool({"middle", "center", "centre", "half"} & set(words)),
            "speaks of values": bool({"value", "values", "number", "numbers", "list"} & set(words)),
            "is a sentence": len(words) >= 3 and text.strip().endswith(".")}


def main():
    said = LOGS / "agent" / "answer.txt"
    status = {name: {check: holds(code) for check, code in checks.items()}
              for name, checks in (("FAIL_TO_PASS", FAIL_TO_PASS), ("PASS_TO_PASS", PASS_TO_PASS))}
    words = properties(said.read_text(errors="replace") if said.is_file() else "")
    fixed, kept = status["FAIL_TO_PASS"], status["PASS_TO_PASS"]
    reward = 0.5 * sum(fixed.values()) / len(fixed) + 0.5 * sum(words.values()) / len(words) if all(kept.values()) else 0.0
    tests = {name: {"success": [c for c, ok in checks.items() if ok], "failure": [c for c, ok in checks.items() if not ok]}
             for name, checks in status.items()}
    report = {"median": {"resolved": all(fixed.values()) and all(kept.values()), "tests_status": tests, "answer": words}}
    (LOGS / "verifier" / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (LOGS / "verifier" / "reward.txt").write_text(f"{reward:.6f}\n")
    print(json.dumps(report, indent=2))
    print(f"reward {reward:.6f}")


main()
