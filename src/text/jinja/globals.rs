//! The names of the functions that every template can call.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Global {
    Range,
    Dict,
    Namespace,
    Cycler,
    Joiner,
    Lipsum,
    RaiseException,
    StrftimeNow,
}

impl Global {
    pub fn named(name: &str) -> Option<Global> {
        Some(match name {
            "range" => Global::Range,
            "dict" => Global::Dict,
            "namespace" => Global::Namespace,
            "cycler" => Global::Cycler,
            "joiner" => Global::Joiner,
            "lipsum" => Global::Lipsum,
            "raise_exception" => Global::RaiseException,
            "strftime_now" => Global::StrftimeNow,
            _ => return None,
        })
    }

    pub fn repr(self) -> &'static str {
        match self {
            Global::Range => "<function safe_range>",
            Global::Dict => "<class 'dict'>",
            Global::Namespace => "<class 'jinja2.utils.Namespace'>",
            Global::Cycler => "<class 'jinja2.utils.Cycler'>",
            Global::Joiner => "<class 'jinja2.utils.Joiner'>",
            Global::Lipsum => "<function generate_lorem_ipsum>",
            Global::RaiseException => "<function raise_exception>",
            Global::StrftimeNow => "<function strftime_now>",
        }
    }
}
