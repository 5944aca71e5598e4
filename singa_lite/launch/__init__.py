# SPDX-License-Identifier: Apache-2.0
"""Starting the processes of a job, and watching over them until the last has ended; no rank imports this."""
