"""Who runs next.

Pure host code: sequences, the plan of a step, the batch it becomes, and the bucket it runs in.
"""
