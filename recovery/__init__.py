"""Recovery: from the object store back to a database, and from log and store back to its pages."""
