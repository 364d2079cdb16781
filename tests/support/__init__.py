"""Helpers that tests share: models, meshes, grids of cases, readers of HLO. No test lies here."""
