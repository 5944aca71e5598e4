# SPDX-License-Identifier: Apache-2.0
"""What stands in for a GPU and its libraries in tests; see cupy/ and emulation.h."""
