# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend, one file per family of kernels."""
