"""Bazel's own C++ and Java rules, under the names its tools load them by.

Bazel 4 carries these rules, yet before it runs a Python test it loads them from `@rules_cc` and
`@rules_java`, which it would download. Nothing here is compiled from C++ or Java.
"""

def _native_rules(context):
    aliases = ["{0} = native.{0}".format(rule) for rule in context.attr.rules]
    context.file(context.attr.package + "/BUILD")
    context.file(context.attr.package + "/defs.bzl", "\n".join(aliases))

native_rules = repository_rule(
    implementation = _native_rules,
    attrs = {
        "package": attr.string(),
        "rules": attr.string_list(),
    },
)
