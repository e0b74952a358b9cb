"""What tests need in an importable place: models, fakes and drivers that workers can load."""
