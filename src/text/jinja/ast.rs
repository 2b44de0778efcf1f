//! The syntax tree. Expressions are in one vector and refer to each other by index, so that a deep
//! tree is freed without recursion.

/// A name of the template, as an index into `Tree::names`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name(pub u32);

/// An expression, as an index into `Tree::expressions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExprId(pub u32);

/// A parsed template.
#[derive(Debug, Default)]
pub struct Tree {
    pub names: Vec<String>,
    pub expressions: Vec<Expr>,
    pub macros: Vec<MacroDef>,
    pub body: Vec<Statement>,
}

impl Tree {
    pub fn name(&self, name: Name) -> &str {
        &self.names[name.0 as usize]
    }

    pub fn expr(&self, id: ExprId) -> &Expr {
        &self.expressions[id.0 as usize]
    }
}

#[derive(Debug)]
pub struct Statement {
    pub line: u32,
    pub kind: StatementKind,
}

#[derive(Debug)]
pub enum StatementKind {
    Text(String),
    Print(ExprId),
    If {
        branches: Vec<(ExprId, Vec<Statement>)>,
        otherwise: Vec<Statement>,
    },
    For(Box<For>),
    Set {
        target: Target,
        value: ExprId,
    },
    SetBlock {
        target: Target,
        filters: Vec<Modifier>,
        body: Vec<Statement>,
    },
    With {
        assignments: Vec<(Target, ExprId)>,
        body: Vec<Statement>,
    },
    FilterBlock {
        filters: Vec<Modifier>,
        body: Vec<Statement>,
    },
    /// Defines the macro `Tree::macros[index]`.
    Macro(usize),
    /// Calls a macro with a body that the macro can render by `caller()`.
    CallBlock {
        caller: usize,
        callee: ExprId,
        arguments: Arguments,
    },
    /// `{% block %}`, `{% autoescape %}` and `{% generation %}`: a body with a scope of its own.
    Scope {
        from_root: bool,
        body: Vec<Statement>,
    },
    Break,
    Continue,
    /// `include`, `import` and similar statements, which fail because no other template can be
    /// loaded.
    NeedsLoader(&'static str),
}

#[derive(Debug)]
pub struct For {
    pub target: Target,
    pub iterable: ExprId,
    pub condition: Option<ExprId>,
    pub recursive: bool,
    pub body: Vec<Statement>,
    pub otherwise: Vec<Statement>,
}

#[derive(Debug, Clone)]
pub enum Target {
    Name(Name),
    /// `{% set namespace.attribute = ... %}`
    Attribute(Name, String),
    Tuple(Vec<Target>),
}

/// A macro, or the body of a call block.
#[derive(Debug)]
pub struct MacroDef {
    /// `None` for the body of a call block.
    pub name: Option<Name>,
    pub parameters: Vec<Name>,
    /// Defaults of the last parameters.
    pub defaults: Vec<ExprId>,
    pub body: Vec<Statement>,
    /// Which of `caller`, `varargs` and `kwargs` the body reads. The macro accepts only these.
    pub takes: Extras,
}

#[derive(Debug, Clone, Copy, Default)]
pub struct Extras {
    pub caller: bool,
    pub varargs: bool,
    pub kwargs: bool,
}

#[derive(Debug, Clone)]
pub enum Constant {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(String),
}

#[derive(Debug)]
pub enum Expr {
    Constant(Constant),
    Name(Name),
    List(Vec<ExprId>),
    Tuple(Vec<ExprId>),
    Dict(Vec<(ExprId, ExprId)>),
    Negative(ExprId),
    Positive(ExprId),
    Not(ExprId),
    And(ExprId, ExprId),
    Or(ExprId, ExprId),
    Binary(Operator, ExprId, ExprId),
    Concat(Vec<ExprId>),
    Compare(ExprId, Vec<(Comparison, ExprId)>),
    Conditional { test: ExprId, yes: ExprId, no: Option<ExprId> },
    Attribute(ExprId, String),
    Item(ExprId, ExprId),
    Slice(Option<ExprId>, Option<ExprId>, Option<ExprId>),
    Call(ExprId, Arguments),
    Filter(ExprId, Modifier),
    Test(ExprId, Modifier),
}

/// A filter or a test, with its arguments.
#[derive(Debug)]
pub struct Modifier {
    pub name: String,
    pub arguments: Arguments,
}

#[derive(Debug, Default)]
pub struct Arguments {
    pub positional: Vec<ExprId>,
    pub named: Vec<(String, ExprId)>,
    /// `*iterable`
    pub spread: Option<ExprId>,
    /// `**mapping`
    pub spread_named: Option<ExprId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Modulo,
    Power,
}

impl Operator {
    pub fn symbol(self) -> &'static str {
        match self {
            Operator::Add => "+",
            Operator::Subtract => "-",
            Operator::Multiply => "*",
            Operator::Divide => "/",
            Operator::FloorDivide => "//",
            Operator::Modulo => "%",
            Operator::Power => "**",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    NotIn,
}
