"""Object stores: S3 and what speaks like it, Google Cloud, Azure."""
