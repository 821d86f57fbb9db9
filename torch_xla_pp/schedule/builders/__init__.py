"""Builders of tables of actions."""
