"""The patched libllama through ctypes: the only place that knows about ctypes.

`loader` finds, loads and checks the library, `signatures` is the table of its functions, `errcheck`
turns return codes into exceptions, `context` holds models and contexts.
"""
