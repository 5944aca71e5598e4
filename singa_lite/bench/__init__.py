# SPDX-License-Identifier: Apache-2.0
"""Comparing synchronisation schemes by measurement; ``singa-lite bench sync`` is in sync.py."""
