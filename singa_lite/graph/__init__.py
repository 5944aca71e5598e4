# SPDX-License-Identifier: Apache-2.0
"""A training step as a tape of nodes: memory.py and nodes.py define what is on it, recorder.py writes it."""
