# SPDX-License-Identifier: Apache-2.0
"""How long tests wait for what should come at once."""

# A hang must fail, not stall. Far above what anything takes, also where eight processes want each core of a machine;
# pytest's own limit in pyproject.toml is above it.
LIMIT_S = 600.0
