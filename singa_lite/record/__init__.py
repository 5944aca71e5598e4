# SPDX-License-Identifier: Apache-2.0
"""Which recorded step belongs to a call of a model (records.py), a run that is recorded (run.py), a recorded step
(record.py), the attributes that it sets (attributes.py) and who reads these too early (watched.py), and what it reads
in Python (variables.py)."""
