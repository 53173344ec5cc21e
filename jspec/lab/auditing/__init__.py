"""The audit: checks that a target, a drafter and a rule are lossless, on the machine it runs on."""
