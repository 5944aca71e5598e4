# SPDX-License-Identifier: Apache-2.0
"""Which recorded step belongs to a call of a model (records.py), the attributes that it sets (attributes.py), and what
it reads in Python (variables.py)."""
