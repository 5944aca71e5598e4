# SPDX-License-Identifier: Apache-2.0
"""Comparing dist_options: by training with each (sync.py), and by predicting steps on another network (plan.py).

compare.py compares two results of sync.py; allreduce.py times collectives.
"""
