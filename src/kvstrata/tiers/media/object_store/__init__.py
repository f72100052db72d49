"""Object stores: S3 and compatible services, Google Cloud Storage, Azure Blob Storage."""
