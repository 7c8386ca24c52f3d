"""An NRI plugin: the injection of `vgpu-runtime create`, for clusters that keep their runtime handler (docs/nri.md).

Speaks to containerd's or CRI-O's NRI socket: `multiplex` cuts the connection into two, `ttrpc` carries calls over each,
`plugin` answers them, `adjustment` decides with the same `plan_edits` as the shim. It freezes and restores nothing.
The protocol is NRI's v1alpha1 (nri.pkg.api.v1alpha1); facts checked with containerd 2.1.
"""
