#!/usr/bin/env bash
# Checks every version pinned in constraints.txt for known vulnerabilities, with pip-audit.
#   bash scripts/dev/audit.sh
# Needs the network, to query the databases and to install pip-audit, into a temporary environment.
# Exit code: 0 all pins were checked and none is vulnerable, 1 one is vulnerable, 2 one could not be checked.
set -uo pipefail
cd "$(dirname "$0")/../.."
[ $# -eq 0 ] || { echo "error: unknown option $1: there are none" >&2 && exit 2; }

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if ! "${PYTHON:-python3}" -m venv "$folder" ||
    ! "$folder/bin/pip" install --quiet --disable-pip-version-check pip-audit; then
    echo "error: pip-audit cannot be installed: nothing was checked; this needs the network" >&2
    exit 2
fi
"$folder/bin/pip-audit" --requirement constraints.txt --no-deps --disable-pip --progress-spinner off \
    --format json --output "$folder/found.json"
if [ ! -s "$folder/found.json" ]; then
    echo "error: no answer from the lists: nothing was checked; this needs the network" >&2
    exit 2
fi
"$folder/bin/python" - "$folder/found.json" <<'REPORT'
import json, sys

packages = json.load(open(sys.argv[1]))["dependencies"]
unchecked = [package for package in packages if "vulns" not in package]
vulnerable = [package for package in packages if package.get("vulns")]
for package in vulnerable:
    for found in package["vulns"]:
        known = ", ".join([found["id"], *found.get("aliases", [])])
        fixed = ", ".join(found.get("fix_versions", [])) or "no version yet"
        print(f"{package['name']} {package['version']}: {known}; repaired in {fixed}")
for package in unchecked:
    print(f"{package['name']}: not checked: {package.get('skip_reason', 'no reason given')}")
print(f"{len(packages) - len(unchecked)} of {len(packages)} pins checked, {len(vulnerable)} vulnerable")
sys.exit(1 if vulnerable else 2 if unchecked or not packages else 0)
REPORT
