"""Tests of `ddp_impl`, beside what they test."""
