# SPDX-License-Identifier: Apache-2.0
"""MXNet's key-value store: workers push arrays to keys, which servers or all workers keep, and pull them."""
