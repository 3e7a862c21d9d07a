"""What tests of several rooms share: small runs, data sets, servers, models and records."""
