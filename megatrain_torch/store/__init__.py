"""The Python side of the store (csrc/core): records of parameters, the tensors over their memory that wait before they
are read, gradients' memory, files of tensors, and what of a unit comes and goes. Looks at base."""
