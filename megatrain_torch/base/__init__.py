"""What every room may use, and what knows nothing of them: errors, arguments, formats, limits of memory, how a
model falls into units, patches of other packages. Looks at nobody.
"""
