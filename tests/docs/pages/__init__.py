"""Pages as pages: their blocks run, their links lead somewhere, the reference is whole."""
