# SPDX-License-Identifier: Apache-2.0
"""Predicting what a dist_option costs on another network and another number of ranks, without having either.

``wire_bytes`` says what a step of each option sends, ``cost`` how long that takes. Nothing here trains or communicates,
and nothing that trains uses it.
"""
