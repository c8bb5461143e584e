"""Carriers: what moves frames between ranks. One narrow protocol, thin implementations."""
