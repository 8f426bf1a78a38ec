"""Save, load, resume, export. Owns what "step n" means on disk.

A step is committed once a checkpoint that contains it is published. `folder` says what a checkpoint
is, `state` which numbers it holds, `save` and `resume` how the ranks write and read them,
`convert` how weights come from a Hugging Face folder and leave as one.
"""
