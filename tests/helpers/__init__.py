"""What tests share: models, training that is recorded, processes. No module here imports a test."""
